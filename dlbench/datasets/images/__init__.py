"""Image sets: folders of JPEGs, shards, packing, verification."""

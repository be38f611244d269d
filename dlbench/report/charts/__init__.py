"""Charts: Vega-Lite specifications and their static SVG."""

"""Container formats of other libraries: TFRecord, tf.Example, HDF5."""

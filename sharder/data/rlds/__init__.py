"""Episodes in TFRecord shards as TFDS writes them (RLDS), read without TensorFlow."""

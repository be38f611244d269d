"""Text sets: corpora, vocabularies, masking, pretraining samples."""

"""Published decoders: of each family the fields of its config.json and the names of its tensors, read and written."""

"""Programs that keep the format's promise: they make the files that the tests compare with."""

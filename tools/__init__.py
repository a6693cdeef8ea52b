"""Programs that keep the format's promise: they make what the tests compare with."""

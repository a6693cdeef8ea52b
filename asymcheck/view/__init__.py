"""A local, read-only web page of a store, and the same page as one static file."""

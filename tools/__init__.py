"""Tools for developers: golden vectors, checks, figures of the documentation, and servers for tests."""

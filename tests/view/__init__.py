"""Tests of the page of `asymcheck view`."""

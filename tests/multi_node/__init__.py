"""Tests of jobs with one store per machine; directories of one machine represent machines."""

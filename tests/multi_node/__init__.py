"""Jobs with one store per machine; directories of one machine stand in for machines."""

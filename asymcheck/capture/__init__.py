"""Background saves: snapshot the state into the ring while training runs, then flush it to the drive."""

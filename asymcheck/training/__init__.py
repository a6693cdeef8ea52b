"""Services for the training loop: resume and rollback, the save interval, and reports of background saves."""

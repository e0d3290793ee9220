"""What all other packages use: errors, checked values, seeds, files, isolation of hooks."""

"""Plans become batch scripts, launch scripts and the commands that start ranks. Pure: nothing is run."""

"""One folder with all that an installation needs, made with a network and used without one."""

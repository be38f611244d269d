"""``python -m dlbench``."""

from dlbench.cli import main

if __name__ == "__main__":
    main()

"""`python -m hexad` is the command `hexad`."""

from hexad.cli.main import main

if __name__ == "__main__":
    main()

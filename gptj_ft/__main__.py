"""`python -m gptj_ft` is `gptj-ft`."""

from gptj_ft.cli import main

if __name__ == "__main__":
    main()

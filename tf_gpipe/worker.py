"""`python -m tf_gpipe.worker`, another name of `python -m tf_gpipe worker`."""

from tf_gpipe.commands.worker import main

if __name__ == "__main__":
    main()

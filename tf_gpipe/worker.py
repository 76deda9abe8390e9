"""`python -m tf_gpipe.worker`, which is `python -m tf_gpipe worker`."""

from tf_gpipe.commands.worker import main

if __name__ == "__main__":
    main()

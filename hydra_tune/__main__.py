"""`python -m hydra_tune` is `hydra-tune`."""

from hydra_tune.cli import main

if __name__ == "__main__":
    main(prog_name="hydra-tune")

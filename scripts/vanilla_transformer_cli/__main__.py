"""`python -m vanilla_transformer_cli`, which `accelerate launch --module` needs."""

from .main import main

if __name__ == "__main__":
    main()

"""`python -m vanilla_transformer_cli`, for `accelerate launch -m`."""

from .main import main

if __name__ == "__main__":
    main()

"""The built-in demo model: a small BLOOM trained on Jane Austen's novels."""

from pathlib import Path

DEMO_MODEL: Path = Path(__file__).resolve().parent  # a Hugging Face directory: config.json, model.safetensors, ...

"""A student as a Hugging Face model folder."""

"""depthgrow: grow a language model in depth while distilling it from a teacher."""

__version__ = "0.1.0"

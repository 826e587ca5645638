"""Documents from corpora, their tokens, and the batches a step reads: in this order, each knowing only the one before."""

"""The mesh of ranks, its collectives and the pipeline's links; each counts its bytes and time.

The only room of the engine that may call ``torch.distributed``. No model code.
"""

"""The mathematics on plain tensors: no files, no models, no network.

Shapes are written as suffixes where they help: a layer is m x n, a subspace has p coordinates,
there are T tasks; so ``U_mp``, ``V_np``, ``H_pp``.
"""

"""The definition of every op: plain, differentiable PyTorch that reads like the formula, without performance tricks.

In float64 these functions *are* the meaning of the ops; every other backend is held to them, forward and backward.
Their gradients come from autograd, so they are independent of the hand-written backwards of the native backends.
"""

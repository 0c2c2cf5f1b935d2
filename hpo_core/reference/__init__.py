"""The definition of every op: plain, differentiable PyTorch, read like the formula, no performance tricks.

In float64 these functions *are* what the library means; every other backend is held to them, forward and backward.
Their gradients are autograd's, so they are independent of the hand-written backwards of the native backends.
"""

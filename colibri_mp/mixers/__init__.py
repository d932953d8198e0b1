"""Mixers: what a layer does before its experts, by kind. The one place that knows which kinds there are is `KINDS` in `kinds.py`.

    kind         what a kind says of itself: its stage, its cache, its weights, its bytes
    attention    grouped-query attention
    mla          multi-head latent attention
    delta_net    the gated delta net, whose states lie in slots
    kinds        the kind of a spec; sums over the layers of a model, for the memory plan
    layers       the stages and caches of a model, by layer

A new kind is: a spec (`specs`), its tensors (`models.structure`), a compiled stage (`kernels`), a file here, and a line in `KINDS`.
"""

"""What a run would have met in another memory or with another policy, from its route trace.

    Trace ─▶ workload: unions of each layer ─┐
    header, planner ─▶ sizes: slots ─────────┼─▶ grid: misses of each (size, policy) ─▶ prediction: tokens/s ─▶ report, plot
    cache, policies: the pool's rules ───────┘

No model is loaded and nothing is read but the trace and, for sizes in bytes, the headers of its checkpoint.
"""

"""Runs code of people and policies that the mesh does not trust: sandboxes, their limits, and what runs in them.

    sandbox ── bubblewrap, user, cgroup (limits) ─────────▶ a process that first confines itself
               (confinement: namespaces, landlock, seccomp) and then runs one of
                   program         one program that a policy wrote, against one test
                   interpreters    the tool `python`: one interpreter per row
                   commands        a launch script of verl's, with stand-ins for what it starts
                   meshrl.rewardd.pool.scoring_process    reward functions
    environment ── packages that a submitted function may import, installed beside it

Reading order: `sandbox` (the three levels), `limits`, `confinement`. Imports no torch and no gRPC.
"""

"""Data-parallel training under a limited bandwidth: what `gradwire train` runs.

    settings   what the user asked for, checked
    schedule   learning rate of a step
    data       images in memory; sharded, seeded, augmented batches
    models     lenet, resnet20, resnet56, resnet110
    devices    the device of a worker: CPU or one of the GPUs
    network    a rate-limited network of namespaces for processes of one machine
    strategies how the ranks keep one model: hook, sharded optimizer, local steps, plain DDP
    loop       one training run of one rank with one codec, and its clocks
    worker     a rank's process: joins the others, runs the codecs one after another
    launcher   starts the workers of one machine, follows them, ends them
    progress   what the user sees meanwhile
    report     what all ranks measured, as a table and as JSON
    plots      the same as pictures

Importing this package imports neither PyTorch nor matplotlib.
"""

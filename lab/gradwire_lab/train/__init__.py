"""Data-parallel training under a limited bandwidth: what `gradwire train` runs.

    settings    the options of the command
    options     the settings that a command line asks for, with the defaults that follow
    checks      what settings no run can have
    recipes     the data sets and models, their metrics and defaults
    errors      the error that ends a training
    schedule    the learning rate of a step
    describe    the recipe and the exchange of a training, in words
    optimizers  SGD, Adam or AdamW of the settings
    data        images in memory; sharded, seeded, augmented batches
    text        Python's standard library as a text, and windows of it
    models      lenet, mlp and ResNets
    text_models gpt and lstm
    devices     the device of a worker: CPU or one of the GPUs
    network     a rate-limited network of namespaces for processes of one machine
    strategy    what a rank does in a step: the base of the strategies
    rivals      DDP and PyTorch's own hooks, which are compared with codecs
    torch_ddp   their strategy
    strategies  how the workers keep one model: hook, sharded optimizer, local steps, rivals
    loop        one rank's training run with one codec, and its clock
    worker      a rank's process: joins the others, runs the codecs one after another
    launcher    starts the workers of one machine, follows them, ends them
    run         a training from its settings to its report
    estimate    how long a run will take
    progress    the bars on a terminal
    records     the results of one rank
    report      the results of all ranks as a table and as JSON
    results     a folder with a file for each run, from which a command goes on
    plots       the results as pictures

Importing this package imports neither PyTorch nor matplotlib.
"""

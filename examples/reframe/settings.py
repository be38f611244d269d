"""ReFrame's view of this machine: one partition without a scheduler, and the form of one of a cluster. Edit both."""

site_configuration = {
    "systems": [
        {
            "name": "my-cluster",
            "descr": "A cluster with Slurm",
            # Of its login nodes
            "hostnames": ["login[0-9]+"],
            "partitions": [
                {
                    "name": "gpu",
                    "scheduler": "slurm",
                    # dlbench calls srun itself
                    "launcher": "local",
                    "environs": ["builtin"],
                    "access": ["--partition=gpu", "--account=my-account"],
                    "resources": [{"name": "gpu", "options": ["--gpus-per-node={num_gpus_per_node}"]}],
                }
            ],
        },
        {
            "name": "this-machine",
            "descr": "Any machine, without a scheduler",
            "hostnames": [".*"],
            "partitions": [
                {
                    "name": "default",
                    "scheduler": "local",
                    "launcher": "local",
                    "environs": ["builtin"],
                }
            ],
        },
    ],
}

"""ReFrame's view of this machine: one partition without a scheduler. Replace it with your site's settings."""

site_configuration = {
    "systems": [
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
        }
    ],
}

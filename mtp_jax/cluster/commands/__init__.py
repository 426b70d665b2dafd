"""The command line of the cluster: see ``extend.register``."""

"""The application: its routes, access control, the socket, signals; requests without a socket."""

"""What the commands share: measurements that they read, a fit by least squares, and processes of a peer simulator."""

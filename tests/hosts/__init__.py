"""Hosts to test on: sshd on loopback (:mod:`.loopback`) and a container with systemd (:mod:`.container`)."""

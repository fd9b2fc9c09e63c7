"""Guests: one QEMU process each, ended by its own id whatever happens."""

import fcntl
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

KVM_CREATE_VM = 0xAE01
# A guest on working KVM reaches its first program in a second.
PROBE_S = 15
# Bytes that a link between two guests holds: some thirty frames of 9000 bytes. The kernel may give less.
LINK_BYTES = 1 << 20


def accelerator(kernel, initramfs, folder):
    """`kvm` where a guest really runs on it, else `tcg`: software emulation.

    A device that can be opened is not enough: inside some virtual machines it makes guests that fail
    at an instruction or stand still, so one is booted as far as its first program.
    """
    try:
        device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return "tcg"
    try:
        os.close(fcntl.ioctl(device, KVM_CREATE_VM, 0))
    except OSError:
        return "tcg"
    finally:
        os.close(device)
    console = folder / "console-probe.log"
    guest = Guest("probe", kernel, initramfs, folder, console, "kvm", memory_mib=256, cpus=1)
    try:
        deadline = time.monotonic() + PROBE_S
        # QEMU stands still after an error of KVM's, and has said so.
        while not guest.ended() and not guest.complaint() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        guest.end()
    works = console.exists() and b"the machine works" in console.read_bytes()
    return "kvm" if works else "tcg"


def cable():
    """Both ends of a link: each message is a frame, and a full link makes its sender wait, not lose."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
    return ends


class Guest:
    """A running guest. `links` are (socket, MAC address); the sockets are QEMU's from now on."""

    def __init__(self, role, kernel, initramfs, share, console, accel, memory_mib, cpus, links=()):
        self.role, self.console = role, Path(console)
        machine = platform.machine()
        if accel == "tcg":
            accel = "tcg,thread=multi"
        serial = "ttyS0" if machine == "x86_64" else "ttyAMA0"
        append = (f"console={serial} loglevel=4 panic=-1 mitigations=off net.ifnames=0 "
                  f"atlas.role={role}")
        command = [f"qemu-system-{machine}", "-accel", accel, "-cpu", "max", "-smp", cpus, "-m", memory_mib,
                   "-kernel", kernel / "boot" / f"vmlinuz-{(kernel / 'version').read_text().strip()}",
                   "-initrd", initramfs, "-append", append, "-no-reboot", "-nodefaults", "-display", "none",
                   "-serial", f"file:{console}",
                   "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
                   "-virtfs", f"local,path={escaped(share)},mount_tag=results,security_model=none"]
        if machine == "aarch64":
            command += ["-machine", "virt,gic-version=max"]
        for number, (end, address) in enumerate(links):
            command += ["-netdev", f"dgram,id=n{number},local.type=fd,local.str={end.fileno()}", "-device",
                        f"virtio-net-pci,netdev=n{number},mac={address},host_mtu=9000,romfile="]
        # Not even a killed harness leaves a guest behind.
        command = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
        self.errors = open(self.console.with_suffix(".qemu"), "wb")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.errors, stderr=self.errors,
                                        pass_fds=[end.fileno() for end, _ in links], start_new_session=True)

    def ended(self):
        """Whether the guest switched itself off, or QEMU gave up."""
        return self.process.poll() is not None

    def complaint(self):
        """What QEMU itself wrote, which is nothing when all is well."""
        return self.console.with_suffix(".qemu").read_text(errors="replace").strip()

    def end(self):
        """Ends QEMU at once, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def escaped(path):
    """A path inside QEMU's comma-separated options."""
    return str(path).replace(",", ",,")


def wait_all(guests, seconds):
    """True once all have ended, false when time is up."""
    deadline = time.monotonic() + seconds
    while not all(g.ended() for g in guests):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def missing_tools():
    """Programs that are needed here and not found."""
    needed = [f"qemu-system-{platform.machine()}", "setpriv", "cpio", "busybox", "modprobe", "cargo"]
    return [tool for tool in needed if not shutil.which(tool)]

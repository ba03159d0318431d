"""The filter on system calls for programs in the cage: a table, and the classic BPF that `jail.py`
hands to the kernel.

Denied, with EPERM: what makes or enters namespaces, mounts, traces or reads other processes, loads
code into the kernel, keeps memory that no limit of a process counts (System V IPC, memfd, AIO),
io_uring, sockets of other families than Unix and Internet (that of virtual machines, vsock, is in
no namespace), and limits of other processes. `clone3`, whose flags a filter cannot see, does not
exist (ENOSYS, so that the C library uses `clone`), nor does any number above LAST, which covers
what is newer than this table and the x32 ABI, whose numbers have bit 30 set.

It is a list of what is denied, not of what is allowed: programs may import anything that is
installed. Left out: architectures other than x86_64 and aarch64.
"""

import struct

EPERM, ENOSYS = 1, 38
LAST = 456  # futex_requeue, of Linux 6.7
NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
FAMILIES = (1, 2, 10)  # Unix, Internet, Internet 6
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# name, number on x86_64, on aarch64 (-: it has no such call)
_OLD = """
unshare 272 97, setns 308 268, chroot 161 51, sethostname 170 161, setdomainname 171 162, mount 165 40,
umount2 166 39, pivot_root 155 41, swapon 167 224, swapoff 168 225, quotactl 179 60, name_to_handle_at 303
264, open_by_handle_at 304 265, fanotify_init 300 262, ptrace 101 117, kcmp 312 272, process_vm_readv 310 270,
process_vm_writev 311 271, perf_event_open 298 241, bpf 321 280, userfaultfd 323 282, init_module 175 105,
delete_module 176 106, finit_module 313 273, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142,
syslog 103 116, acct 163 89, vhangup 153 58, personality 135 92, add_key 248 217, request_key 249 218, keyctl
250 219, modify_ldt 154 -, ioperm 173 -, iopl 172 -, memfd_create 319 279, io_setup 206 0, shmget 29 194,
shmat 30 196, shmctl 31 195, shmdt 67 197, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192,
msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180
"""
# name, number on all architectures
_NEW = """
io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428, move_mount 429, fsopen 430,
fsconfig 431, fsmount 432, fspick 433, pidfd_getfd 438, process_madvise 440, mount_setattr 442, quotactl_fd
443, memfd_secret 447, process_mrelease 448
"""
_CLONE = {"x86_64": 56, "aarch64": 220}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435

_LOAD, _IS, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF's codes for words
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = (
    0,
    4,
    16,
)  # offsets in seccomp_data; of an argument, its low half
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def denied(machine: str) -> dict[str, int]:
    """Return the numbers of the system calls that are denied whatever their arguments are, by
    name."""
    column = 1 + list(ARCHITECTURES).index(machine)
    old, new = ([entry.split() for entry in table.split(",")] for table in (_OLD, _NEW))
    numbers = {entry[0]: entry[column] for entry in old} | dict(new)
    return {name: int(number) for name, number in numbers.items() if number != "-"}


def filter_for(machine: str) -> bytes | None:
    """Return the filter, an array of `struct sock_filter`, for a machine as `platform.machine`
    calls it; None for a machine without one."""
    if machine not in ARCHITECTURES:
        return None
    fail = (_RETURN, 0, 0, _FAIL | EPERM)
    missing = (_RETURN, 0, 0, _FAIL | ENOSYS)
    allow = (_RETURN, 0, 0, _ALLOW)
    first = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_IS, 1, 0, ARCHITECTURES[machine]), fail]
    program += [
        (_LOAD, 0, 0, _NUMBER),
        (_ABOVE, 0, 1, LAST),
        missing,
        (_IS, 0, 1, _CLONE3),
        missing,
    ]
    for number in denied(machine).values():
        program += [(_IS, 0, 1, number), fail]
    program += [(_IS, 0, 4, _CLONE[machine]), first, (_ANY_BIT, 0, 1, NEW_NAMESPACE), fail, allow]
    program += [
        (_IS, 0, 4, _PRLIMIT[machine]),
        first,
        (_IS, 1, 0, 0),
        fail,
        allow,
    ]  # 0: its own limits
    skip = len(FAMILIES)
    program += [(_IS, 0, skip + 3, _SOCKET[machine]), first]
    program += [(_IS, skip - i, 0, family) for i, family in enumerate(FAMILIES)]
    program += [fail, allow, allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)

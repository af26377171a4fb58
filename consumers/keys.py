"""The key of a string or of bytes, for who looks rows up: FarmHash Fingerprint64.

Examples
--------
>>> hex(fingerprint64(b""))
'0x9ae16a3b2f90404f'
"""

from consumers._decode_kernels import fingerprint64, fingerprint64_many

__all__ = ["fingerprint64", "fingerprint64_many"]

"""libadze.so through ctypes. Structs and numbers are read from include/adze.h: nothing is declared twice."""

import ctypes
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
C_TYPES = {
    "void *": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def read_header(path):
    """The structs of a call by name, and the integers that the header names."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    structs, numbers = dict(C_TYPES), {}
    for name, value in re.findall(r"^#define (ADZE_\w+) +\(?(-?\d+)u?\)?\s*$", text, flags=re.M):
        numbers[name] = int(value)
    for body in re.findall(r"typedef enum \w+ \{(.*?)\}", text, flags=re.S):
        for name, value in re.findall(r"(ADZE_\w+) = (\d+)", body):
            numbers[name] = int(value)
    for body, name in re.findall(r"typedef struct \w+ \{([^}]*)\} (adze_(?:tensor|stream|call|\w+_args));", text):
        fields = []
        for kind, star, names in re.findall(r"(\w+)\s+(\*?)([\w,\s\[\]]+);", body):
            for member, count in re.findall(r"(\w+)(?:\[(\d+)\])?", re.sub(r"\s", "", names)):
                c_type = structs[f"{kind} *" if star else kind]
                fields.append((member, c_type * int(count) if count else c_type))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    for known, name in re.findall(r"typedef (adze_\w+) (adze_\w+);", text):
        structs[name] = structs[known]
    return structs, numbers


class Adze:
    """Calls ops by name with torch tensors: adze("rms_norm", out=y, x=x, eps=1e-6)."""

    def __init__(self, torch, library=None):
        self.structs, self.numbers = read_header(ROOT / "include" / "adze.h")
        self.library = ctypes.CDLL(str(library or ROOT / "build" / "libadze.so"))
        self.library.adze_last_error.restype = ctypes.c_char_p
        self.torch = torch
        names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
        names |= {"int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8E4M3"}
        self.dtypes = {getattr(torch, name): self.numbers[f"ADZE_{short}"] for name, short in names.items()}

    def tensor(self, t):
        view = self.structs["adze_tensor"](t.data_ptr())
        view.rank, view.dtype = t.dim(), self.dtypes[t.dtype]
        view.shape[: t.dim()] = t.shape
        view.stride[: t.dim()] = t.stride()
        return view

    def __call__(self, op, flags=0, **fields):
        args = self.structs[f"adze_{op}_args"]()
        args.call.size, args.call.flags = ctypes.sizeof(args), flags
        device, place = self.structs["adze_stream"](self.numbers["ADZE_CPU"], None), "cpu"
        for name, value in fields.items():
            if isinstance(value, self.torch.Tensor):
                if value.is_cuda:
                    stream = self.torch.cuda.current_stream(value.device).cuda_stream
                    device, place = self.structs["adze_stream"](value.device.index, stream), value.device
                value = self.tensor(value)
            setattr(args, name, value)
        if hasattr(self.library, f"adze_{op}_scratch"):
            size = ctypes.c_size_t()
            self.check(getattr(self.library, f"adze_{op}_scratch")(device, ctypes.byref(args), ctypes.byref(size)))
            scratch = self.torch.empty(size.value, device=place, dtype=self.torch.uint8)
            args.call.scratch, args.call.scratch_size = scratch.data_ptr(), size.value
        self.check(getattr(self.library, f"adze_{op}")(device, ctypes.byref(args)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.library.adze_last_error().decode())

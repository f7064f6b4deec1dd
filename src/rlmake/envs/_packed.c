/* A list of integers as msgpack packs it, one to nine bytes each, into an array of 32 bits: `compact._token_ids`.
   Optional: where no compiler was found at installation, msgspec and struct serve. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

static uint64_t big_endian(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

/* The number at `*at`, which moves behind it; 0 where it is no integer, is cut off or needs more than 32 bits. */
static int one(const uint8_t **at, const uint8_t *end, int32_t *out) {
    uint8_t tag = *(*at)++;
    if (tag < 0x80 || tag >= 0xe0) {
        *out = (int8_t)tag;
        return 1;
    }
    if (!((tag >= 0xcc && tag <= 0xcf) || (tag >= 0xd0 && tag <= 0xd3))) return 0;
    int is_signed = tag >= 0xd0, bytes = 1 << (tag - (is_signed ? 0xd0 : 0xcc));
    if (end - *at < bytes) return 0;
    uint64_t value = big_endian(*at, bytes);
    *at += bytes;
    if (is_signed) {
        int64_t number = (int64_t)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes);
        if (number < INT32_MIN || number > INT32_MAX) return 0;
        *out = (int32_t)number;
        return 1;
    }
    *out = (int32_t)value;
    return value <= INT32_MAX;
}

/* int32s(packed, head, out, count) -> whether `count` integers of 32 bits, and nothing else, lie behind `head` bytes;
   they are at the address `out` then. */
static PyObject *int32s(PyObject *module, PyObject *arguments) {
    Py_buffer packed;
    Py_ssize_t head, out, count;
    if (!PyArg_ParseTuple(arguments, "y*nnn", &packed, &head, &out, &count)) return NULL;
    const uint8_t *at = (const uint8_t *)packed.buf + head, *end = (const uint8_t *)packed.buf + packed.len;
    int good = head >= 0 && head <= packed.len;
    for (Py_ssize_t i = 0; good && i < count; i++) good = at < end && one(&at, end, (int32_t *)out + i);
    good = good && at == end;
    PyBuffer_Release(&packed);
    return PyBool_FromLong(good);
}

static PyMethodDef methods[] = {{"int32s", int32s, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_packed", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__packed(void) { return PyModuleDef_Init(&definition); }

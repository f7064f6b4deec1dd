/* Conversions that take torch several passes over memory: `fp8.quantize_torch` and `writer.checked`, byte for byte.
   Optional: where no compiler was found at installation, the operations of torch serve. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

/* In a checkpoint that is mapped a tensor may lie at any address. */
#if defined(__GNUC__)
typedef uint32_t __attribute__((aligned(1), may_alias)) any32;
typedef uint16_t __attribute__((aligned(1), may_alias)) any16;
#else
typedef uint32_t any32;
typedef uint16_t any16;
#endif

static inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float number(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* The nearest bfloat16, ties to even, as the bits of a float. Infinity stays, NaN stays NaN. */
static inline uint32_t rounded(uint32_t u) {
    uint32_t near = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : near;
}

/* The nearest e4m3, ties to even, of a number that rounds to at most 448. Below 2^-6 the sum with 2^14 rounds it to
   multiples of 2^-9; above it the exponent changes its bias, and the upper three bits of the mantissa stay. */
static inline uint8_t e4m3(float x) {
    uint32_t u = bits(x), a = u & 0x7fffffff;
    uint32_t normal = (a - (120u << 23) + 0x7ffff + (a >> 20 & 1)) >> 20;
    uint32_t small = bits(number(a) + 16384.0f) - bits(16384.0f);
    return (uint8_t)((a < 121u << 23 ? small : normal) | (u >> 24 & 0x80));
}

/* Blocks side by side, `rows` high, of fp32 (`buffer` holds them as bf16) or of bf16 (`buffer` is NULL). Memory is read
   row by row, as processors foresee it; the strip at `next`, `next_width` bytes wide, is fetched during the divisions. */
CLONES static void side_by_side(const void *weight, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t cols, Py_ssize_t block,
                                uint16_t *restrict buffer, uint8_t *restrict q, Py_ssize_t q_stride,
                                float *restrict scale, const char *next, Py_ssize_t next_width) {
    Py_ssize_t count = (cols + block - 1) / block;
    for (Py_ssize_t b = 0; b < count; b++) scale[b] = 0;
    for (Py_ssize_t r = 0; r < rows; r++)
        for (Py_ssize_t b = 0; b < count; b++) {
            Py_ssize_t left = b * block, right = left + block < cols ? left + block : cols;
            uint32_t largest = bits(scale[b]); /* magnitudes order as integers, NaN above infinity */
            if (buffer) {
                const any32 *in = (const any32 *)weight + r * stride;
                uint16_t *out = buffer + r * cols;
                for (Py_ssize_t c = left; c < right; c++) {
                    uint32_t u = rounded(in[c]), magnitude = u & 0x7fffffff;
                    out[c] = (uint16_t)(u >> 16);
                    largest = magnitude > largest ? magnitude : largest;
                }
            } else {
                const any16 *in = (const any16 *)weight + r * stride;
                uint16_t most = (uint16_t)(largest >> 16);
                for (Py_ssize_t c = left; c < right; c++) {
                    uint16_t magnitude = in[c] & 0x7fff;
                    most = magnitude > most ? magnitude : most;
                }
                largest = (uint32_t)most << 16;
            }
            scale[b] = number(largest);
        }
    for (Py_ssize_t b = 0; b < count; b++) {
        scale[b] /= 448.0f;
        if (scale[b] < 1e-12f) scale[b] = 1e-12f;
    }
    for (Py_ssize_t r = 0; r < rows; r++) {
        const any16 *in = buffer ? (const any16 *)(buffer + r * cols) : (const any16 *)weight + r * stride;
        const char *ahead = next + r * stride * (buffer ? 4 : 2);
        for (Py_ssize_t b = 0; b < count; b++) {
            Py_ssize_t from = b * next_width / count, to = (b + 1) * next_width / count;
            for (Py_ssize_t c = from; c < to; c += 64) __builtin_prefetch(ahead + c, 0, 2);
            Py_ssize_t left = b * block, right = left + block < cols ? left + block : cols;
            float factor = scale[b];
            for (Py_ssize_t c = left; c < right; c++)
                q[r * q_stride + c] = e4m3(number((uint32_t)in[c] << 16) / factor);
        }
    }
}

/* quantize(weight, itemsize, stride, rows, cols, block, q, scale): addresses of memory that the caller holds. */
static PyObject *quantize(PyObject *module, PyObject *arguments) {
    Py_ssize_t weight, itemsize, stride, rows, cols, block, q, scale;
    if (!PyArg_ParseTuple(arguments, "nnnnnnnn", &weight, &itemsize, &stride, &rows, &cols, &block, &q, &scale))
        return NULL;
    Py_ssize_t width = block < 1024 ? 1024 / block * block : block; /* stays in the processor's cache */
    uint16_t *buffer = itemsize == 4 ? malloc((size_t)block * width * sizeof(uint16_t)) : NULL;
    if (itemsize == 4 && !buffer) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    Py_ssize_t grid = (cols + block - 1) / block;
    for (Py_ssize_t top = 0; top < rows; top += block)
        for (Py_ssize_t left = 0; left < cols; left += width) {
            Py_ssize_t wide = cols - left < width ? cols - left : width;
            Py_ssize_t there = left + width < cols ? top * stride + left + width : (top + block) * stride;
            side_by_side((const char *)weight + (top * stride + left) * itemsize, stride,
                         rows - top < block ? rows - top : block, wide, block,
                         buffer, (uint8_t *)q + top * cols + left, cols,
                         (float *)scale + top / block * grid + left / block,
                         (const char *)weight + there * itemsize, wide * itemsize);
        }
    Py_END_ALLOW_THREADS
    free(buffer);
    Py_RETURN_NONE;
}

CLONES static uint32_t to_bf16(const any32 *restrict in, Py_ssize_t count, uint16_t *restrict out) {
    uint32_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t u = rounded(in[i]), magnitude = u & 0x7fffffff;
        out[i] = (uint16_t)(u >> 16);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* round_to_bf16(in, count, out) -> whether all are finite: addresses of fp32 and of bf16. */
static PyObject *round_to_bf16(PyObject *module, PyObject *arguments) {
    Py_ssize_t in, count, out;
    uint32_t largest;
    if (!PyArg_ParseTuple(arguments, "nnn", &in, &count, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    largest = to_bf16((const any32 *)in, count, (uint16_t *)out);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(largest < 0x7f800000);
}

static PyMethodDef methods[] = {{"quantize", quantize, METH_VARARGS, NULL},
                                {"round_to_bf16", round_to_bf16, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }

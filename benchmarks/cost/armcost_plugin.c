/* QEMU TCG plugin: counts executions of every translated block of the guest
 * while a region of interest is open. The region opens at `hint #96` and closes
 * at `hint #97` (both are NOPs on real silicon). When it closes, the counts are
 * appended to the output as "region N" and a line "count n_insns pc opcodes..."
 * per block, and start again from zero: one process can measure many regions.
 *
 * Only the handful of prototypes used here is declared, for plugin API 1..4.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef API
#define API 1
#endif

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct { const char *target_arch; } qemu_info_t;
enum { CB_NO_REGS = 0 };

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = API;

typedef void (*tb_trans_cb)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*udata_cb)(unsigned, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, tb_trans_cb);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, udata_cb, int, void *);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, udata_cb, int, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
#if API >= 3
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *, void *, size_t);
#else
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
#endif

#define HINT(n) (0xd503201fu | ((uint32_t)(n) << 5))

typedef struct block {
    struct block *next;
    uint64_t pc, count;
    uint32_t n, op[];
} block;

static block *blocks;
static volatile int roi;
static int lock;
static FILE *out;

static void acquire(void) { while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) ; }
static void release(void) { __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); }

static void on_block(unsigned cpu, void *p) {
    (void)cpu;
    if (roi) __atomic_fetch_add(&((block *)p)->count, 1, __ATOMIC_RELAXED);
}
static void on_begin(unsigned cpu, void *p) { (void)cpu; (void)p; roi = 1; }
static void on_end(unsigned cpu, void *p) {
    static unsigned region;
    (void)cpu; (void)p;
    if (!roi) return;
    roi = 0;
    acquire();
    fprintf(out, "region %u\n", region++);
    for (block *b = blocks; b; b = b->next) {
        uint64_t count = __atomic_exchange_n(&b->count, 0, __ATOMIC_RELAXED);
        if (!count) continue;
        fprintf(out, "%llu %u %llx", (unsigned long long)count, b->n, (unsigned long long)b->pc);
        for (uint32_t i = 0; i < b->n; i++) fprintf(out, " %08x", b->op[i]);
        fputc('\n', out);
    }
    fflush(out);
    release();
}

static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    size_t n = qemu_plugin_tb_n_insns(tb);
    block *b = calloc(1, sizeof *b + 4 * n);
    b->pc = qemu_plugin_tb_vaddr(tb);
    b->n = n;
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *in = qemu_plugin_tb_get_insn(tb, i);
#if API >= 3
        qemu_plugin_insn_data(in, &b->op[i], 4);
#else
        memcpy(&b->op[i], qemu_plugin_insn_data(in), 4);
#endif
        if (b->op[i] == HINT(96)) qemu_plugin_register_vcpu_insn_exec_cb(in, on_begin, CB_NO_REGS, NULL);
        if (b->op[i] == HINT(97)) qemu_plugin_register_vcpu_insn_exec_cb(in, on_end, CB_NO_REGS, NULL);
    }
    acquire();
    b->next = blocks;
    blocks = b;
    release();
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, CB_NO_REGS, b);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++)
        if (!strncmp(argv[i], "out=", 4)) out = fopen(argv[i] + 4, "w");
    if (!out) {
        fputs("armcost: the argument out=FILE is missing or cannot be written\n", stderr);
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    return 0;
}

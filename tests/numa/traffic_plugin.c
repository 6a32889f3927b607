/* QEMU TCG plugin: counts the bytes that are loaded from and stored to every page of
 * a window of virtual addresses, in user space. Tests map what they want to be
 * measured there (tests/numa/traffic.py), one view for each process.
 *
 * A store to the control page, which lies behind the last view, is a command:
 * offset 0 forgets all counts; offset 8 writes them to the output as lines "view page
 * cpus loaded stored loaded-once stored-once"; offset 64 * (n + 1) tells that the CPU
 * that does it is number n of the guest.
 *
 * Accesses by helpers of the emulator, such as those of SVE, are not seen.
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
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct { const char *target_arch; } qemu_info_t;
enum { CB_NO_REGS = 0 };
enum { MEM_READ_WRITE = 3 };

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = API;

typedef void (*tb_trans_cb)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*mem_cb)(unsigned, qemu_plugin_meminfo_t, uint64_t, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, tb_trans_cb);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, mem_cb, int, int, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
unsigned qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t);

/* As in traffic.py. */
#define WINDOW 0x5e0000000000ull
#define VIEW (1ull << 32)
#define VIEWS 16
#define PAGE 4096
#define PAGES 8192
#define CPUS 16

typedef struct {
    uint64_t loaded, stored, cpus;                          /* bytes, however often; guest CPUs, a bit each */
    uint64_t loaded_once[PAGE / 64], stored_once[PAGE / 64]; /* a bit for each byte */
} page;

static page *pages[VIEWS][PAGES];
static int guest_cpu[CPUS];
static const char *path;

static page *page_of(unsigned view, uint64_t number) {
    page **place = &pages[view][number], *found = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    if (found) return found;
    page *made = calloc(1, sizeof *made);
    if (__atomic_compare_exchange_n(place, &found, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return made;
    free(made);
    return found;
}

static void forget(void) {
    for (unsigned view = 0; view < VIEWS; view++)
        for (unsigned i = 0; i < PAGES; i++)
            if (pages[view][i]) memset(pages[view][i], 0, sizeof(page));
}

static unsigned long long count_bits(const uint64_t *words) {
    unsigned long long n = 0;
    for (unsigned i = 0; i < PAGE / 64; i++) n += (unsigned)__builtin_popcountll(words[i]);
    return n;
}

static void write_counts(void) {
    FILE *out = fopen(path, "w");
    if (!out) return;
    for (unsigned view = 0; view < VIEWS; view++)
        for (unsigned i = 0; i < PAGES; i++) {
            const page *p = pages[view][i];
            if (!p || !(p->loaded | p->stored)) continue;
            fprintf(out, "%u %u %llu %llu %llu %llu %llu\n", view, i, (unsigned long long)p->cpus,
                    (unsigned long long)p->loaded, (unsigned long long)p->stored, count_bits(p->loaded_once),
                    count_bits(p->stored_once));
        }
    fputs("end\n", out);
    fclose(out);
}

static void on_access(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void *unused) {
    (void)unused;
    uint64_t offset = address - WINDOW;
    if (offset >= (VIEWS + 1) * VIEW || cpu >= CPUS) return;
    unsigned view = (unsigned)(offset / VIEW);
    bool store = qemu_plugin_mem_is_store(info);
    offset %= VIEW;
    if (view == VIEWS) {
        if (!store) return;
        if (offset == 0) forget();
        else if (offset == 8) write_counts();
        else if (offset % 64 == 0) guest_cpu[cpu] = (int)(offset / 64) - 1;
        return;
    }
    if (offset / PAGE >= PAGES) return;
    unsigned size = 1u << qemu_plugin_mem_size_shift(info);
    page *p = page_of(view, offset / PAGE);
    __atomic_fetch_add(store ? &p->stored : &p->loaded, size, __ATOMIC_RELAXED);
    __atomic_fetch_or(&p->cpus, 1ull << (guest_cpu[cpu] & 63), __ATOMIC_RELAXED);
    uint64_t *once = store ? p->stored_once : p->loaded_once;
    for (unsigned byte = offset % PAGE, end = byte + size; byte < end && byte < PAGE; byte++)
        __atomic_fetch_or(&once[byte / 64], 1ull << byte % 64, __ATOMIC_RELAXED);
}

static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    size_t n = qemu_plugin_tb_n_insns(tb);
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *in = qemu_plugin_tb_get_insn(tb, i);
        /* The kernel's half of the address space. */
        if (qemu_plugin_insn_vaddr(in) >> 63) return;
        qemu_plugin_register_vcpu_mem_cb(in, on_access, CB_NO_REGS, MEM_READ_WRITE, NULL);
    }
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++)
        if (!strncmp(argv[i], "out=", 4)) path = strdup(argv[i] + 4);
    if (!path) {
        fputs("traffic: the argument out=FILE is missing\n", stderr);
        return 1;
    }
    for (int i = 0; i < CPUS; i++) guest_cpu[i] = -1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    return 0;
}

/* A made NVML for tests: what nvidia-ml-py calls, answered from arithmetic and from the environment.

Switches (names are of NVML's C functions, devices are numbers, codes are nvmlReturn_t):

FAKE_NVML_GPUS=2                       how many GPUs
FAKE_NVML_INIT=9                       nvmlInit answers with this code
FAKE_NVML_UNSUPPORTED=name,name@1      these calls answer NotSupported (3), on all devices or on one
FAKE_NVML_FIELDS_UNSUPPORTED=82,52     these field values carry the code NotSupported
FAKE_NVML_FAIL_AFTER=name=3:10,...     from the fourth call on (of each device), the call answers with this code
FAKE_NVML_FIELDS_FAIL_AFTER=138=3:999  the same for field values (counted over links)
FAKE_NVML_LOST=1=40                    device 1 is lost after so many calls to it: all answer GPU_IS_LOST (15)
FAKE_NVML_ENERGY_RESET=5               from the sixth reading of each device its energy counter starts at zero again
FAKE_NVML_MIG=0                        this device is in MIG mode, with instances at 0 and 2 of three places
FAKE_NVML_GPM=0                        the GPUs have no GPM
FAKE_NVML_GPM_REFUSED=60               this metric of GPM answers NotSupported
FAKE_NVML_NVLINKS=4                    links of each GPU; those with an odd number are down
FAKE_NVML_POWER_W=250                  power of GPU 0; each next one takes 10 W more
FAKE_NVML_REASONS=4                    the mask of clock reasons
FAKE_NVML_COMPUTE_MODE=3               the compute mode of all GPUs (3: exclusive process)
FAKE_NVML_COMPUTE_PID=4711             the process that computes on each
FAKE_NVML_NAME=text                    name of the GPUs
FAKE_NVML_LOG=file                     a line for each call: name and device; setters write `SET name`

Energy is power times the time since the first nvmlInit, and 1,000 J. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_DEVICES 16
#define INSTANCES 3

typedef struct {
  int number;   /* of the GPU */
  int instance; /* of MIG; -1: the GPU itself */
  long calls;
} Device;

typedef struct {
  unsigned int field, scope;
  int64_t timestamp, latency;
  unsigned int type, code;
  union { double d; unsigned int ui; unsigned long long ull; } value;
} FieldValue;

static Device gpus[MAX_DEVICES], instances[MAX_DEVICES][INSTANCES];
static int users;
static struct timespec start;

static long option(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static void mark(const char *what, const char *name, int device) {
  const char *path = getenv("FAKE_NVML_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  if (device < 0) fprintf(file, "%s%s\n", what, name);
  else fprintf(file, "%s%s %d\n", what, name, device);
  fclose(file);
}

/* How often a name was called on a device, this time included. */
static long times(const char *name, int device) {
  static struct { char name[80]; int device; long count; } seen[512];
  for (int i = 0; i < 512; i++) {
    if (!seen[i].name[0]) {
      snprintf(seen[i].name, sizeof seen[i].name, "%s", name);
      seen[i].device = device;
    }
    if (!strcmp(seen[i].name, name) && seen[i].device == device) return ++seen[i].count;
  }
  abort();
}

/* The part of a comma-separated switch that is about this name; what follows it, or NULL. */
static const char *about(const char *variable, const char *name) {
  const char *text = getenv(variable);
  size_t length = strlen(name);
  while (text && *text) {
    if (!strncmp(text, name, length) && strchr(",=@", text[length])) return text + length;
    text = strchr(text, ',');
    if (text) text++;
  }
  return NULL;
}

static int due(const char *variable, const char *name, int device) {
  const char *found = about(variable, name);
  char *end;
  long count = times(name, device);
  if (!found || *found != '=') return 0;
  if (count <= strtol(found + 1, &end, 10)) return 0;
  return *end == ':' ? (int)strtol(end + 1, NULL, 10) : 999;
}

static int entered(const char *name, Device *device) {
  const char *found;
  char number[16];
  mark("", name, device->number);
  if (users < 1) return 1;
  device->calls++;
  snprintf(number, sizeof number, "%d", device->number);
  found = about("FAKE_NVML_LOST", number);
  if (found && *found == '=' && gpus[device->number].calls > strtol(found + 1, NULL, 10)) return 15;
  found = about("FAKE_NVML_UNSUPPORTED", name);
  if (found && (*found != '@' || strtol(found + 1, NULL, 10) == device->number)) return 3;
  return due("FAKE_NVML_FAIL_AFTER", name, device->number);
}

#define ENTER(device) \
  do { int code = entered(__func__, device); if (code) return code; } while (0)

static int is_split(const Device *device) {
  return option("FAKE_NVML_MIG", -1) == device->number;
}

static double power_w(const Device *device) { return option("FAKE_NVML_POWER_W", 250) + 10.0 * device->number; }

int nvmlInitWithFlags(unsigned int flags) {
  int code = (int)option("FAKE_NVML_INIT", 0);
  (void)flags;
  mark("", __func__, -1);
  if (code) return code;
  if (!start.tv_sec) clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < MAX_DEVICES; i++) {
    gpus[i].number = i;
    gpus[i].instance = -1;
    for (int k = 0; k < INSTANCES; k++) {
      instances[i][k].number = i;
      instances[i][k].instance = k;
    }
  }
  users++;
  return 0;
}

int nvmlShutdown(void) {
  mark("", __func__, -1);
  if (users < 1) return 1;
  users--;
  return 0;
}

const char *nvmlErrorString(int code) { return code == 27 ? "Not ready, says the made NVML" : "A made error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  mark("", __func__, -1);
  snprintf(text, length, "550.54.15");
  return users < 1 ? 1 : 0;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
  mark("", __func__, -1);
  *count = (unsigned int)option("FAKE_NVML_GPUS", 2);
  return users < 1 ? 1 : 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int number, Device **device) {
  if (number >= MAX_DEVICES) return 2;
  ENTER(&gpus[number]);
  *device = &gpus[number];
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
  unsigned int number;
  if (sscanf(uuid, "GPU-%u-", &number) != 1 || number >= MAX_DEVICES) return 6;
  ENTER(&gpus[number]);
  *device = &gpus[number];
  return 0;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int length) {
  ENTER(device);
  if (device->instance < 0) snprintf(text, length, "GPU-%08d-0000-0000-0000-000000000000", device->number);
  else snprintf(text, length, "MIG-%08d-0000-0000-0000-%012d", device->number, device->instance);
  return 0;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned int length) {
  const char *name = getenv("FAKE_NVML_NAME");
  ENTER(device);
  snprintf(text, length, "%s", name ? name : "Made GPU");
  return 0;
}

typedef struct {
  char legacy[16];
  unsigned int domain, bus, device, id, subsystem;
  char bus_id[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
  ENTER(device);
  memset(info, 0, sizeof *info);
  info->bus = 0x10 + (unsigned int)device->number;
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
  return 0;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) {
  ENTER(device);
  *milliwatts = (unsigned int)(1000 * power_w(device));
  return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts) {
  ENTER(device);
  *milliwatts = 700000;
  return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
  static struct { double lost; } reset[MAX_DEVICES];
  struct timespec now;
  long after = option("FAKE_NVML_ENERGY_RESET", -1);
  ENTER(device);
  clock_gettime(CLOCK_MONOTONIC, &now);
  double seconds = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
  double total = 1e6 + 1e3 * power_w(device) * seconds;
  if (after >= 0 && times("the energy", device->number) == after + 1) reset[device->number].lost = total;
  *millijoules = (unsigned long long)(total - reset[device->number].lost);
  return 0;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned int *rates) {
  ENTER(device);
  if (is_split(device)) return 3;
  rates[0] = 90;
  rates[1] = 35;
  return 0;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned int type, unsigned int *megahertz) {
  ENTER(device);
  *megahertz = type == 2 ? 2619 : 1755;
  return 0;
}

int nvmlDeviceGetMaxClockInfo(Device *device, unsigned int type, unsigned int *megahertz) {
  ENTER(device);
  *megahertz = type == 2 ? 2619 : 1980;
  return 0;
}

static int reasons(unsigned long long *mask) {
  *mask = (unsigned long long)option("FAKE_NVML_REASONS", 4);
  return 0;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *mask) {
  ENTER(device);
  return reasons(mask);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *mask) {
  ENTER(device);
  return reasons(mask);
}

int nvmlDeviceGetTemperatureV(Device *device, unsigned int *temperature) {
  ENTER(device);
  if (temperature[0] != 0x100000C) return 25;
  temperature[2] = 61;
  return 0;
}

int nvmlDeviceGetTemperature(Device *device, unsigned int sensor, unsigned int *degrees) {
  ENTER(device);
  (void)sensor;
  *degrees = 61;
  return 0;
}

static unsigned long long used(const Device *device) {
  return device->instance < 0 ? 30000000000ull + (unsigned long long)device->number
                              : 5000000000ull + (unsigned long long)device->instance;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *info) {
  ENTER(device);
  info[0] = 80000000000ull;
  info[2] = used(device) + 600000000ull; /* the driver's reserve, which version 1 counts in */
  info[1] = info[0] - info[2];
  return 0;
}

typedef struct {
  unsigned int version;
  unsigned long long total, reserved, free, used;
} MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *info) {
  ENTER(device);
  if (info->version != 0x2000028) return 25;
  info->total = 80000000000ull;
  info->reserved = 600000000ull;
  info->used = used(device);
  info->free = info->total - info->reserved - info->used;
  return 0;
}

int nvmlDeviceGetPcieThroughput(Device *device, unsigned int counter, unsigned int *kilobytes) {
  ENTER(device);
  *kilobytes = counter == 0 ? 1200 : 3400;
  return 0;
}

int nvmlDeviceGetPcieReplayCounter(Device *device, unsigned int *count) {
  ENTER(device);
  *count = 7;
  return 0;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned int type, unsigned int counter, unsigned long long *count) {
  ENTER(device);
  *count = (type == 0 ? 3 : 0) + (counter == 0 ? 0 : 100);
  return 0;
}

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
  ENTER(device);
  if (option("FAKE_NVML_MIG", -1) < 0) return 3;
  *current = *pending = (unsigned int)is_split(device);
  return 0;
}

int nvmlDeviceGetComputeMode(Device *device, unsigned int *mode) {
  ENTER(device);
  *mode = (unsigned int)option("FAKE_NVML_COMPUTE_MODE", 0);
  return 0;
}

typedef struct {
  unsigned int pid;
  unsigned long long bytes;
  unsigned int gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *found) {
  ENTER(device);
  long pid = option("FAKE_NVML_COMPUTE_PID", 0);
  unsigned int room = *count;
  *count = pid > 0;
  if (room < *count) return 7; /* insufficient size */
  if (pid > 0) *found = (Process){(unsigned int)pid, 1000000000ull, 0xffffffffu, 0xffffffffu};
  return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *count) {
  ENTER(device);
  *count = INSTANCES;
  return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int number, Device **instance) {
  ENTER(device);
  if (number >= INSTANCES) return 2;
  if (number == 1) return 6;
  *instance = &instances[device->number][number];
  return 0;
}

static int one_field(Device *device, FieldValue *asked) {
  long links = option("FAKE_NVML_NVLINKS", 4);
  char name[16];
  int code;
  snprintf(name, sizeof name, "%u", asked->field);
  if (about("FAKE_NVML_FIELDS_UNSUPPORTED", name)) return 3;
  code = due("FAKE_NVML_FIELDS_FAIL_AFTER", name, device->number);
  if (code) return code;
  switch (asked->field) {
    case 52: asked->type = 3; asked->value.ull = 11; return 0;
    case 82: asked->type = 1; asked->value.ui = 73; return 0;
    case 91: asked->type = 1; asked->value.ui = (unsigned int)links; return 0;
    case 138:
    case 139:
      if (asked->scope >= (unsigned int)links || asked->scope % 2) return 3;
      asked->type = 3;
      asked->value.ull = (asked->field == 138 ? 1000 : 2000) + asked->scope;
      return 0;
    default: return 3;
  }
}

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
  ENTER(device);
  for (int i = 0; i < count; i++) {
    char name[32];
    values[i].value.ull = 0xdeadbeefdeadbeefull; /* what a careless reader would take for a value */
    values[i].code = (unsigned int)one_field(device, &values[i]);
    snprintf(name, sizeof name, "field %u:%u", values[i].field, values[i].scope);
    mark("", name, device->number);
  }
  return 0;
}

/* GPM: a sample remembers its number, and of which GPU it is. */
typedef struct { long number; int device; } Sample;

typedef struct {
  unsigned int id;
  int code;
  double value;
  struct { char *short_name, *long_name, *unit; } info;
} Metric;

typedef struct {
  unsigned int version, count;
  Sample *first, *second;
  Metric metrics[1];
} MetricsGet;

static long samples_taken;

int nvmlGpmQueryDeviceSupport(Device *device, unsigned int *support) {
  ENTER(device);
  if (support[0] != 1) return 25;
  support[1] = (unsigned int)option("FAKE_NVML_GPM", 1);
  return 0;
}

int nvmlGpmSampleAlloc(Sample **sample) {
  mark("", __func__, -1);
  *sample = calloc(1, sizeof **sample);
  return 0;
}

int nvmlGpmSampleFree(Sample *sample) {
  mark("", __func__, -1);
  free(sample);
  return users < 1 ? 1 : 0;
}

int nvmlGpmSampleGet(Device *device, Sample *sample) {
  ENTER(device);
  if (is_split(device)) return 3;
  sample->number = ++samples_taken;
  sample->device = device->number;
  return 0;
}

int nvmlGpmMetricsGet(MetricsGet *asked) {
  mark("", __func__, -1);
  if (asked->version != 1) return 25;
  /* Only from an older to a newer sample of one GPU. */
  if (!asked->first->number || asked->first->number >= asked->second->number) return 2;
  if (asked->first->device != asked->second->device) return 2;
  for (unsigned int i = 0; i < asked->count; i++) {
    asked->metrics[i].code = (long)asked->metrics[i].id == option("FAKE_NVML_GPM_REFUSED", -1) ? 3 : 0;
    asked->metrics[i].value = 10.0 + asked->metrics[i].id;
  }
  return 0;
}

/* Setters: nobody may call them. */
#define SETTER(name) \
  int name(Device *device) { (void)device; mark("SET ", #name, -1); return 0; }

SETTER(nvmlDeviceSetPowerManagementLimit)
SETTER(nvmlDeviceSetPersistenceMode)
SETTER(nvmlDeviceSetApplicationsClocks)
SETTER(nvmlDeviceResetApplicationsClocks)
SETTER(nvmlDeviceSetGpuLockedClocks)
SETTER(nvmlDeviceResetGpuLockedClocks)
SETTER(nvmlDeviceSetEccMode)
SETTER(nvmlDeviceClearEccErrorCounts)
SETTER(nvmlDeviceSetMigMode)
SETTER(nvmlDeviceSetComputeMode)
SETTER(nvmlDeviceResetNvLinkUtilizationCounter)
SETTER(nvmlDeviceResetNvLinkErrorCounters)
SETTER(nvmlDeviceClearFieldValues)

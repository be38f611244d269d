/* A part of a JPEG becomes RGB pixels: above and beside it only codes are read, below it nothing. */
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <jpeglib.h>
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000006
#error libjpeg-turbo 2.0.6 or newer is needed: older ones crop to other pixels (its ChangeLog, 2.0.0 to 2.0.6)
#endif

struct errors {
    struct jpeg_error_mgr base;
    jmp_buf back;
};

static void give_up(j_common_ptr image) { longjmp(((struct errors *)image->err)->back, 1); }

static void warn(j_common_ptr image, int level) { if (level < 0) give_up(image); }

/* The image is decoded `factor` times smaller; the part is of that. Its rows go to `out` one behind another; `row` has
   room for three bytes for each pixel of a row. Returns whether the whole must be decoded: damaged, or progressive. */
int dlbench_region(const unsigned char *data, unsigned long size, unsigned factor, unsigned left, unsigned top,
                   unsigned right, unsigned bottom, unsigned char *out, unsigned char *row) {
    struct jpeg_decompress_struct image = {0};
    struct errors errors;
    image.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = give_up;
    errors.base.emit_message = warn;
    volatile int failed = 1;
    if (!setjmp(errors.back)) {
        jpeg_create_decompress(&image);
        jpeg_mem_src(&image, data, size);
        jpeg_read_header(&image, TRUE);
        /* All codes of all scans would be read; and where scans are missing, smoothing of blocks differs in a crop. */
        if (jpeg_has_multiple_scans(&image)) give_up((j_common_ptr)&image);
        image.scale_denom = factor;
        image.out_color_space = JCS_RGB;
        jpeg_start_decompress(&image);
        /* Colour is interpolated between two of its pixels: the nearest one beyond an edge is needed, too. */
        JDIMENSION margin = image.max_h_samp_factor, first = left > margin ? left - margin : 0;
        JDIMENSION end = right + margin < image.output_width ? right + margin : image.output_width;
        JDIMENSION width = end - first, bytes = 3 * (right - left);
        jpeg_crop_scanline(&image, &first, &width);
        jpeg_skip_scanlines(&image, top);
        for (; top < bottom; top++, out += bytes) {
            jpeg_read_scanlines(&image, &row, 1);
            memcpy(out, row + 3 * (left - first), bytes);
        }
        failed = 0;
    }
    jpeg_destroy_decompress(&image);
    return failed;
}

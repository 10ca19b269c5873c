// Joins two byte strings of 0 to BYTES bytes each: the paper's `concat`. Bytes beyond a string's
// size must be 0.
module gw_concat #(
    parameter int BYTES = 4,
    localparam int SIZE_BITS = $clog2(BYTES + 1)
) (
    input  logic [  8*BYTES-1:0] low,
    input  logic [SIZE_BITS-1:0] low_size,
    input  logic [  8*BYTES-1:0] high,
    input  logic [SIZE_BITS-1:0] high_size,
    output logic [ 16*BYTES-1:0] bytes,
    output logic [  SIZE_BITS:0] size
);
    assign bytes = {{8 * BYTES{1'b0}}, low} | ({{8 * BYTES{1'b0}}, high} << {low_size, 3'd0});
    assign size  = {1'b0, low_size} + {1'b0, high_size};
endmodule

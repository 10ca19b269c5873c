// The reverse of gw_concat: cuts a byte string after its first low_size bytes. The bytes of `low`
// beyond low_size belong to `high`; who reads `low` knows its size.
module gw_split #(
    parameter int BYTES = 4,
    localparam int SIZE_BITS = $clog2(BYTES + 1)
) (
    input  logic [ 16*BYTES-1:0] bytes,
    input  logic [SIZE_BITS-1:0] low_size,
    output logic [  8*BYTES-1:0] low,
    output logic [  8*BYTES-1:0] high
);
    wire [16*BYTES-1:0] shifted = bytes >> {low_size, 3'd0};
    assign low  = bytes[8*BYTES-1:0];
    assign high = shifted[8*BYTES-1:0];
    wire unused = &{1'b0, shifted[16*BYTES-1:8*BYTES]};
endmodule
